"""The simulator: a compiled stage on a virtual clock, with the scheduler that runs it for real.

    model = model_of_stage(stage, times)          flowrl.sim.of_plan; times of a profile, or assumed
    report = simulate(model, steps=20, workloads={node: workload})        flowrl.sim.run
    print(report_text(report))                                            flowrl.sim.report

Nothing here imports a tensor library or waits for anything; a profile is measured through the
backend protocols (`flowrl.sim.measure_stage`).
"""
