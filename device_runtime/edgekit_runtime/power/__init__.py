"""Power and heat: sensors of the device, energy of requests, and the governor that enforces limits.

Everything here is optional. A device without sensors still serves models, with fewer metrics. This package
does not depend on sessions or HTTP. docs/explanation/power.md describes how the service uses it. Example:

    with Sampling(discover()) as sampling:  # a thread that reads the sensors once a second
        meter, loads, governor = EnergyMeter(), LoadMeter(), Governor(limits, idle_w)
        while True:  # every second; now_s is time.monotonic(), as in readings.at_s
            readings = sampling.latest
            meter.add(readings, {"kws": Work(busy_s, requests)})
            load = loads.measure(now_s, arrived=..., answered=..., late=..., run_s=..., fill=...)
            observations = {"kws": Seen(profile, load, running=setting)}  # one LoadMeter for each model
            for name, decision in governor.tick(now_s, readings, observations).items():
                ...  # open decision.setting, admit decision.admit of the requests
"""
