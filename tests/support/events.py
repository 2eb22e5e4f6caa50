"""Calls callbacks in the order of `fit`, without training."""


def drive(
    model,
    *callbacks,
    epochs=1,
    initial_epoch=0,
    steps=4,
    known=True,
    on_batch=lambda batch: None,
):
    """Calls the callbacks' methods, and `on_batch` as the step of each batch.

    Args:
      model: The model that the callbacks get.
      *callbacks: The callbacks, in order.
      epochs: The number of the last epoch.
      initial_epoch: The index of the first epoch.
      steps: The batches of an epoch.
      known: Whether `fit` knows their number.
      on_batch: What happens between the begin and the end of a batch.

    Returns:
      The logs of each epoch.
    """

    def call(name, *arguments):
        for one in callbacks:
            getattr(one, name)(*arguments)

    call("set_model", model)
    call("set_params", {"epochs": epochs, "steps": steps if known else None})
    call("on_train_begin", {})
    history = []
    for epoch in range(initial_epoch, epochs):
        call("on_epoch_begin", epoch, {})
        for batch in range(steps):
            call("on_train_batch_begin", batch, {})
            on_batch(batch)
            call("on_train_batch_end", batch, {})
        history.append({})
        call("on_epoch_end", epoch, history[-1])
    call("on_train_end", {})
    return history
