"""The public names; lazy_loader reads this file, and so do editors and type checkers."""

from .gpt import GPT as GPT
from .gpt import GPTConfig as GPTConfig
from .layers import Dropout as Dropout
from .layers import DropoutKeys as DropoutKeys
from .layers import Embedding as Embedding
from .layers import LayerNorm as LayerNorm
from .layers import Linear as Linear
from .layers import dropping as dropping
from .module import Module as Module
from .module import Segment as Segment
from .optim import SGD as SGD
from .optim import AdamW as AdamW
from .optim import Optimizer as Optimizer
from .optim import learning_rate as learning_rate
from .parameter import Owner as Owner
from .parameter import Parameter as Parameter
from .parameter import placeholder as placeholder
