"""What a step communicates, known before it runs.

Enters: a model or an optimizer under its strategy. Leaves: a
`CommunicationPlan` of the collectives that its step has. Imports `optimizers`
and above.

- `communication_plan`: traces a step, and lists what it would communicate.
- `plan`: the plan, the difference of two, and how they print.
"""
