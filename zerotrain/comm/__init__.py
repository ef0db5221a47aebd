"""Collectives chosen by backend, counted, and watched so that ranks that disagree get an error instead of a hang."""

from __future__ import annotations

from zerotrain.comm.channel import Channel, Pending
from zerotrain.comm.traffic import Traffic
from zerotrain.comm.watch import Watch

__all__ = ["Channel", "Pending", "Traffic", "Watch"]
