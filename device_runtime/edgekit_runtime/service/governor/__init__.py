"""How the service obeys the power governor."""
