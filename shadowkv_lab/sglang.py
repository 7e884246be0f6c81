"""The plug-in's earlier place: `shadowkv_lab.sglang:register` still resolves."""

from shadowkv_lab.server.plugin import register

__all__ = ["register"]
