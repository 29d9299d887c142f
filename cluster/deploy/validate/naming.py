"""The syntax of names, label keys and values, and ports."""

from __future__ import annotations

import re

_LABEL_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PORT_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_ENVIRONMENT = re.compile(r"[ -<>-~]+")  # printable, without =


def is_label(name: str) -> bool:
    """DNS-1123 label."""
    return _LABEL_1123.fullmatch(name) is not None


def is_service_label(name: str) -> bool:
    """DNS-1035 label: it starts with a letter."""
    return _LABEL_1035.fullmatch(name) is not None


def is_subdomain(name: str) -> bool:
    return len(name) <= 253 and _SUBDOMAIN.fullmatch(name) is not None


def is_qualified_name(key: str) -> bool:
    """Whether it is a key of labels, annotations or extended resources: [domain/]name."""
    prefix, slash, name = key.rpartition("/")
    if slash and not is_subdomain(prefix):
        return False
    return len(name) <= 63 and _QUALIFIED.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    return value == "" or (len(value) <= 63 and _QUALIFIED.fullmatch(value) is not None)


def is_port_name(name: str) -> bool:
    return len(name) <= 15 and _PORT_NAME.fullmatch(name) is not None and any(letter.isalpha() for letter in name)


def is_config_key(key: str) -> bool:
    return len(key) <= 253 and key not in (".", "..") and _CONFIG_KEY.fullmatch(key) is not None


def is_environment_name(name: str) -> bool:
    return _ENVIRONMENT.fullmatch(name) is not None


def is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_535
