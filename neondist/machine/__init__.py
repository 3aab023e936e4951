"""What planning knows of a machine: cores, latency, bandwidth, speed.

figures: what a planner of runs of layers needs. machine: nodes, links and how long things take. file: machines in YAML.
"""

from .figures import Figures
from .file import read, write
from .machine import Link, Machine

__all__ = ["Figures", "Link", "Machine", "read", "write"]
