"""From photographs and sound to answers: decoding on threads around the call of a model."""
