"""The chain: building, canonical text, and what each wrong chain is told."""

import copy
import inspect
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from epinorm.chain import Chain, GroupNorm, LayerNorm, RMSNorm
from epinorm.chain.pointwise import DEFINITIONS, Pointwise

numbers = st.floats(allow_nan=False)
probability = st.floats(0, 1)
eps = st.floats(min_value=0, allow_nan=False)
norms = st.one_of(
    st.builds(GroupNorm, st.integers(1, 10**6), eps=eps),
    st.builds(LayerNorm, eps=eps, num_groups=st.integers(1, 99)),
    st.builds(RMSNorm, eps=st.none() | eps, num_groups=st.integers(1, 99)),
)
operations = st.sampled_from(sorted(DEFINITIONS)).flatmap(
    lambda name: st.builds(
        Pointwise,
        st.just(name),
        st.tuples(
            *(probability if name == "dropout" else numbers for _ in DEFINITIONS[name].parameters)
        ),
    )
)
chains = st.builds(
    lambda norm, pre, post: Chain(norm, tuple(pre), tuple(post)),
    norms,
    st.lists(operations, max_size=3),
    st.lists(operations, max_size=3),
)


@given(chains)
@settings(deadline=None)
def test_text_parses_back_to_the_same_chain(chain):
    again = Chain.parse(str(chain))
    assert again == chain
    assert hash(again) == hash(chain)
    assert str(again) == str(chain)


def test_canonical_text_of_the_headline_chain():
    chain = Chain.build(GroupNorm(512), post=[nn.LeakyReLU(), "scale(2)"])
    assert str(chain) == "group_norm(512,1e-05)|leaky_relu(0.01)|scale(2)"


@pytest.mark.parametrize(
    "text,chain",
    [
        ("group_norm(4)", Chain(GroupNorm(4, eps=1e-5))),
        (" relu | layer_norm | scale( 2 ) ", Chain.build(LayerNorm(), "relu", "scale(2)")),
        ("rms_norm", Chain(RMSNorm())),
        ("rms_norm(1e-6)", Chain(RMSNorm(eps=1e-6))),
        ("layer_norm(0)|clamp(-inf,0.5)", Chain.build(LayerNorm(eps=0.0), (), "clamp(-inf,0.5)")),
    ],
)
def test_other_spellings_are_read(text, chain):
    assert Chain.parse(text) == chain


@pytest.mark.parametrize(
    "text,message",
    [
        (
            "rely",
            "exactly one of group_norm, layer_norm, rms_norm, batch_norm, or .*; 'rely' has 0",
        ),
        ("layer_norm|rms_norm", "exactly one of .*; 'layer_norm|rms_norm' has 2"),
        ("groupnorm(4)", "did you mean 'group_norm'"),
        ("group_norm", r"cannot read 'group_norm': expected group_norm\(num_groups, eps\)"),
        ("group_norm(2.5)", "num_groups must be a whole number, got 2.5"),
        ("group_norm(0)", "num_groups must be at least 1, got 0"),
        ("group_norm(4,-1)", "eps must be a number >= 0, got -1"),
        ("layer_norm(nan)", "eps must be a number >= 0, got nan"),
        ("layer_norm(1,2,3)", r"cannot read 'layer_norm\(1,2,3\)': expected layer_norm\(eps\)"),
        ("layer_norm|leaky_rely", "did you mean 'leaky_relu'"),
        ("group_norm(inf)", "num_groups must be a whole number, got inf"),
        ("group_norm(nan)", "num_groups must be a whole number, got nan"),
        ("group_norm(4", r"cannot read 'group_norm\(4'"),
        ("", "a chain holds exactly one of"),
    ],
)
def test_wrong_texts_are_told_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        Chain.parse(text)


def test_wrong_types_are_told():
    with pytest.raises(TypeError, match="norm must be epinorm.GroupNorm, .* got BatchNorm1d"):
        Chain.build(nn.BatchNorm1d(4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_groups must be an int, got float"):
        GroupNorm(2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_groups must be an int, got bool"):
        GroupNorm(True)


@pytest.mark.parametrize(
    "make,arguments,write",
    [
        (GroupNorm, (8, 256), r"write epinorm.GroupNorm\(num_groups, eps=...\)"),
        (LayerNorm, (256,), r"write epinorm.LayerNorm\(eps=...\)"),
        (RMSNorm, (256,), r"write epinorm.RMSNorm\(eps=...\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_norm_written_as_in_torch_nn_is_told_what_to_write(make, arguments, write):
    with pytest.raises(TypeError, match=f"{write}: eps is keyword-only.* got {make.__name__}"):
        make(*arguments)
    assert inspect.signature(make).parameters["eps"].kind is inspect.Parameter.KEYWORD_ONLY


def test_groups_must_divide():
    chain = Chain(GroupNorm(3))
    assert chain.groups(12) == 3
    assert chain.channels_per_group(12) == 4
    with pytest.raises(ValueError, match="got num_groups=3 and 16 output features"):
        chain.groups(16)
    assert Chain(LayerNorm()).channels_per_group(7) == 7


def test_operand_kinds_come_pre_before_post():
    chain = Chain.build(LayerNorm(), "mul_channel|relu", "add_residual|add_channel")
    assert chain.operand_kinds == ("channel", "element", "channel")


def test_chains_travel():
    chain = Chain.build(GroupNorm(4), "relu", "clamp(0,inf)")
    assert pickle.loads(pickle.dumps(chain)) == chain == copy.deepcopy(chain)
    assert chain.post[0].constants == (0.0, math.inf)
