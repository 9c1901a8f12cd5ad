"""The torch operator namespace `torch.ops.pagewire`: each kernel file defines its ops here and gives their meaning per device."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("pagewire", "FRAGMENT")
