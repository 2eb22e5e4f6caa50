"""Plans what a step communicates before it runs.

Enters: a model or an optimizer under its strategy. Leaves: a
`CommunicationPlan` of the step's collectives. Imports `optimizers` and above.

- `communication_plan`: the public function, which traces a step;
  `CommunicationPlan`, `PlanDifference`, and the tables that they print.
- `step`: the step of a model or an optimizer, of Keras 3 or tf_keras.
"""
