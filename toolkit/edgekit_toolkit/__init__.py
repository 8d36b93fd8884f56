"""The host side: import, optimise, quantize, measure and choose under a budget, pack, sign, report."""
