"""Power and heat: sensors of the device, energy of a request, and the governor that holds a limit.

All of it is optional: a device without sensors still serves models, with fewer metrics. It does not know
requests, sessions or HTTP; docs/explanation/power.md describes how the service uses it.
"""
