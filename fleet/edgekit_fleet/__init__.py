"""The fleet: releases and rollouts over MQTT, enrolment, the manager and its console."""
