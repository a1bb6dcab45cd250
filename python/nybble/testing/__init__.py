"""Checks that anyone can run on a 4-bit multiply of their own."""

from .contract import CHECKS, ContractViolation, checkpoint_contract

__all__ = ["CHECKS", "ContractViolation", "checkpoint_contract"]
