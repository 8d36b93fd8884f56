"""The HTTPS server of the fleet for enrolment, renewal, downloads and uploads."""
