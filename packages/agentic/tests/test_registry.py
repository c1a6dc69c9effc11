import sys

import pytest
from agentic import UnknownEnvironment
from agentic.environments import Calculator, SingleTurn, environment_factory
from agentic.environments.registry import ENVIRONMENTS


def test_every_registered_name_leads_to_its_class():
    assert {name: environment_factory(name) for name in ENVIRONMENTS} == {
        "calculator": Calculator,
        "single_turn": SingleTurn,
    }


def test_an_import_path_leads_to_an_environment_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_worlds.py").write_text("class World:\n    reset = step = close = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_worlds", raising=False)
    assert environment_factory("my_worlds:World").__name__ == "World"
    with pytest.raises(UnknownEnvironment, match=r"no class or function 'Wurld'; its environments are World"):
        environment_factory("my_worlds:Wurld")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("calculater", "calculator, single_turn"), ("singel-turn", "single_turn, calculator")],
)
def test_an_unknown_name_lists_what_there_is_nearest_first(name, nearest):
    with pytest.raises(UnknownEnvironment, match=f"'{name}' is not known; there are {nearest}"):
        environment_factory(name)


@pytest.mark.parametrize("name", ["", ":", "a b:c", "..x:y", ":World"])
def test_what_is_no_import_path_is_refused(name):
    with pytest.raises(UnknownEnvironment, match="is not known"):
        environment_factory(name)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(UnknownEnvironment, match=r"no module 'no_such_module\.deep'"):
        environment_factory("no_such_module.deep:World")


def test_a_module_whose_own_import_fails_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_module_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_nobody_has"):
        environment_factory("needs_more:World")


def test_an_attribute_that_is_no_factory_is_refused():
    with pytest.raises(UnknownEnvironment, match="no class or function 'ENVIRONMENTS'"):
        environment_factory("agentic.environments.registry:ENVIRONMENTS")
