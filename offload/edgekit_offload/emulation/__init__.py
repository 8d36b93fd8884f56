"""A slow device, a server and a link between them on one machine; whatever is measured here is `emulated`."""
