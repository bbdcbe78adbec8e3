"""The reader of published profiles."""

import json

import pytest

from thinwire.errors import CodecTextError, PlanError, ProfileError
from thinwire.planner.published import Published

CONTENT = {
    "about": "anything",
    "models": {
        "small": {
            "tensors": [["last.bias", 100, 0.0], ["last.weight", 1_000_000, 250.0], ["first", 3_000_000, 1500.0]]
        },
        "one": {"tensors": [["only", 40_000_000, 5000.0]]},
    },
    "codec_us": {
        "about": "anything",
        "fp16": [26, 22],
        "random_k": {"one_level": [88, 34], "two_level": [1000, 100]},
        "dgc": {"one_level": [390, 34]},
        "efsignsgd": {"one_level": [270, 140]},
    },
}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "profiles.json").write_text(json.dumps(CONTENT))
    return tmp_path / "profiles.json"


def test_models_and_codecs(file):
    found = Published.load(file)
    assert [t.elements for t in found.model("small")] == [100, 1_000_000, 3_000_000]
    dgc = found.codec("dgc", 0.02)
    assert (dgc.encode, dgc.decode) == pytest.approx((356e-6, 34e-6))
    assert dgc.bytes_per_element == pytest.approx(0.16)
    assert dgc.codec == "dgc(density=0.02)"
    assert found.codec("dgc(density=0.001)").bytes_per_element == pytest.approx(0.008)
    assert found.codec("random_k").codec == ""  # gathered with indices: no codec of ours
    ours = found.codec("randomk(density=0.01)")
    assert ours.summed
    assert ours.bytes_per_element == pytest.approx(0.04)
    assert found.codec("sign").by_message == 1.0
    assert found.codec("fp16").summed


def test_what_is_not_known_is_said(file):
    found = Published.load(file)
    with pytest.raises(ProfileError, match=r"no profile of 'smal'; did you mean 'small'\?"):
        found.model("smal")
    for codec in ("micro", "adacomp", "lowrank(rank=4)", "int8"):
        with pytest.raises(PlanError, match="costs on a GPU is not known"):
            found.codec(codec)
    with pytest.raises(PlanError, match="the file of profiles has no times"):
        found.codec("onebit")
    with pytest.raises(CodecTextError, match="no codec 'zip'"):
        found.codec("zip")
    with pytest.raises(CodecTextError, match="not a schedule"):
        found.codec("dgc(density=Warmup(0.01, steps=10))")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("models"), "missing required field `models`"),
        (lambda c: c["models"]["small"].update(tensors=[]), "has no tensors"),
        (lambda c: c["models"]["small"]["tensors"].append(["x", 0, 1.0]), r"Expected `int` >= 1.*tensors\[3\]\[1\]"),
        (
            lambda c: c["models"]["small"]["tensors"].append(["x", 5, -1.0]),
            r"Expected `float` >= 0.0.*tensors\[3\]\[2\]",
        ),
        (lambda c: c["models"]["small"]["tensors"].append(["first", 5, 1.0]), "is listed twice"),
        (lambda c: c["models"]["small"]["tensors"].append(["x", "many", 1.0]), "Expected `int`"),
        (lambda c: c["codec_us"].update(dgc=[5]), "are not"),
        (lambda c: c["codec_us"].update(dgc=[5, 9]), "decode alone takes 9"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, change, message):
    content = json.loads(json.dumps(CONTENT))
    change(content)
    (tmp_path / "p.json").write_text(json.dumps(content))

    def read():
        found = Published.load(tmp_path / "p.json")
        return found.model("small"), found.codec("dgc")

    with pytest.raises(ProfileError, match=message):
        read()
