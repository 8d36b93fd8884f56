"""A slow device, a server and a link between them on one machine; every measurement here is `emulated`."""
