"""A model of any format behind one protocol: its inputs and outputs, how it runs here, what it costs."""
