"""Early setup before slow imports: signal handlers of a command, and the heartbeat of a rank."""

import os

from .heartbeat import connect
from .signals import listen_in_command

connect(os.environ)
listen_in_command()
