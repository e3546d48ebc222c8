"""Measured costs: seconds and bytes of stages and layers, seconds of links."""

from penstock.measuring.balance import balance
from penstock.measuring.layers import measure_layers
from penstock.measuring.links import Links, measure_links
from penstock.measuring.stability import MeasurementWarning
from penstock.measuring.stages import Measurement, measure, measure_closely
from penstock.measuring.wires import measure_wires

__all__ = [
    "Links",
    "Measurement",
    "MeasurementWarning",
    "balance",
    "measure",
    "measure_closely",
    "measure_layers",
    "measure_links",
    "measure_wires",
]
