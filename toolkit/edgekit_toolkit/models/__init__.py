"""A model of any format behind one protocol: what it takes and gives, how it runs here, what it costs."""
