"""One engine in the simulator: its batch from event to event, what is drawn, what is recorded.

How a choice of strategy comes to take time, in five files:

    tltlab/state.py               StepState: what a policy sees of a worker
    tltlab/policies/selector.py   Selector.choose(state) -> Strategy, which every policy implements
    regime.py                     what the strategy costs and yields at this batch
    batch.py                      Batch.advance(regime) -> MacroStep: iterations until something happens, their seconds
    worker.py                     asks, advances, waits (env.timeout), reports the outcome: the only user of SimPy

Beside that path: `scheduler` selects the running requests, `by_request` has the sources of gains by request,
`memoryless` finishes a rollout in closed form, `log` keeps the macro-steps and `record` makes tables of them.
"""
