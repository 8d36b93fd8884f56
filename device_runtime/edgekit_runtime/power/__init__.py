"""Power and heat: sensors of the device, energy of a request, and the governor that holds a limit.

Everything here is optional: a device without sensors serves as ever, with fewer figures. Nothing here
knows of requests, sessions or HTTP; the seam to the service is described in docs/explanation/power.md.
"""
