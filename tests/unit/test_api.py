"""`kvstore.api` is one flat import, however its modules are cut."""

import importlib
import pkgutil

from kvstore import api


def test_every_public_name_of_its_modules_is_imported_from_the_package():
    modules = [importlib.import_module(f"kvstore.api.{found.name}") for found in pkgutil.iter_modules(api.__path__)]
    made = {
        name
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    made |= {name for name in vars(importlib.import_module("kvstore.api.words")) if name[0].isupper()} - {"Final", "Literal"}
    assert made | {"CALLS", "BY_NAME"} == set(api.__all__)


def test_every_call_asks_and_answers_with_what_the_package_names():
    for call in api.CALLS:
        assert getattr(api, call.request.__name__) is call.request
        assert getattr(api, call.answer.__name__) is call.answer
        assert api.BY_NAME[call.name] is call
