"""The HTTPS server of the fleet: enrolment, renewal, and the files that devices fetch."""
