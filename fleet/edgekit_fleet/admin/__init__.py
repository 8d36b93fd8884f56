"""The listener for people and programs: console and HTTP interface, apart from that of the devices."""
