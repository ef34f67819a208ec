"""The commands of the command line; importing them is cheap, and none needs jax before it runs."""

from jaxserve.commands.advise import Advise
from jaxserve.commands.bench import Bench
from jaxserve.commands.chat import Chat
from jaxserve.commands.command import Command
from jaxserve.commands.compile import Compile
from jaxserve.commands.convert import Convert
from jaxserve.commands.evaluate import Evaluate
from jaxserve.commands.generate import Generate
from jaxserve.commands.plan import Plan
from jaxserve.commands.pull import Pull

BUILT_IN: tuple[Command, ...] = (
    Pull(),
    Generate(),
    Chat(),
    Convert(),
    Evaluate(),
    Compile(),
    Bench(),
    Plan(),
    Advise(),
)

__all__ = ["BUILT_IN", "Command"]
