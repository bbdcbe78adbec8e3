"""Profiles and plans as files: what is written is read, and what is wrong is named."""

import msgspec
import pytest

from tests.planner import examples
from thinwire.errors import PlanError, ProfileError
from thinwire.planner.drift import scaled
from thinwire.planner.plan import VERSION, Plan, PlanGroup, PlanTensor
from thinwire.planner.profile import Line, Link, Profile


def test_a_profile_comes_back(tmp_path):
    profile = examples.profile()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(version=99), "version 99"),
        (lambda p: p.update(tensors=[]), "no tensors"),
        (lambda p: p.update(backward=-1.0), r"Expected `float` >= 0.0.*\$.backward"),
        (lambda p: p.update(fit=0.0), r"Expected `float` > 0.0.*\$.fit"),
        (lambda p: p.update(backward="soon"), r"Expected `float`.*\$.backward"),
        (lambda p: p.pop("links"), "missing required field `links`"),
        (lambda p: p.update(links=[]), "no link all_reduce flat"),
        (lambda p: p["tensors"].append(p["tensors"][0]), "'layer0' is listed twice"),
        (lambda p: p["tensors"][1].update(ready=0.0), "'layer1' is ready at 0 s, before"),
        (lambda p: p["tensors"][3].update(ready=9.0), "after the end of backward"),
        (lambda p: p["tensors"][0].update(elements=7), "'layer0' has 7 elements and shape"),
        (lambda p: p["codecs"][1].update(codec="cost"), "there is no codec 'cost'"),
        (lambda p: p["codecs"].pop(0), "costs of 'dense' are missing"),
        (lambda p: p["cluster"].update(nodes=3), "fingerprint"),
        (lambda p: p["cluster"].update(nodes=0), r"Expected `int` >= 1.*\$.cluster.nodes"),
        (lambda p: p["codecs"][1]["encode"].update(slope=-1.0), r"Expected `float` >= 0.0.*codecs\[1\].encode.slope"),
        (lambda p: p.update(color="blue"), "unknown field `color`"),
    ],
)
def test_a_broken_profile_is_refused_by_name(tmp_path, change, message):
    content = msgspec.json.decode(msgspec.json.encode(examples.profile()))
    change(content)
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(ProfileError, match=message):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_what_is_no_json_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.load(tmp_path / "p.json")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"no profile .*nowhere.json"):
        Profile.load(tmp_path / "nowhere.json")


def plan(**changes) -> Plan:
    profile = examples.profile()
    whole = Plan(
        VERSION,
        profile.fingerprint,
        "example",
        profile.cluster,
        "fast",
        "joint",
        0.2,
        0.1,
        0.3,
        tuple(PlanTensor(t.name, t.shape, t.dtype) for t in profile.tensors),
        (PlanGroup(("layer0", "layer1"), "dense"), PlanGroup(("layer2", "layer3"), "topk(density=0.01)", "B")),
    )
    return msgspec.structs.replace(whole, **changes)


def test_a_plan_comes_back(tmp_path):
    plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "version 7"),
        ({"groups": (PlanGroup(("layer0", "layer1", "layer2", "layer3"), "zip"),)}, "no codec 'zip'"),
        ({"groups": (PlanGroup(("layer0", "layer1", "layer2", "layer3"), "dense", "Z"),)}, "'Z' is not a chain"),
        ({"groups": (PlanGroup(("layer0", "layer1"), "dense"),)}, "'layer2' is in no group"),
        ({"groups": (PlanGroup(("layer0", "layer0"), "dense"),)}, "'layer0' stands in two groups"),
        ({"groups": (PlanGroup(("other",), "dense"),)}, "'other' is not among"),
        ({"groups": (PlanGroup((), "dense"),)}, "group 0 is empty"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        plan(**changes).validate()


def job(**changes):
    tensors = {t.name: (t.shape, t.dtype) for t in plan().tensors}
    tensors.update(changes)
    return {name: value for name, value in tensors.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "world", "message"),
    [
        (job(layer1=None), 2, "the plan of 'example' has a tensor 'layer1', the model has none"),
        (job(layer9=((3,), "float32")), 2, "the model has a tensor 'layer9'"),
        (job(layer1=((5, 5), "float32")), 2, r"'layer1' has shape \(5, 5\)"),
        (job(layer1=((1_000_000,), "torch.bfloat16")), 2, "'layer1' is bfloat16, in the plan float32"),
        (job(), 4, "the job has 4 ranks, the plan is for 2"),
    ],
)
def test_a_plan_of_another_job_is_refused_with_the_first_difference(tensors, world, message):
    plan().check(job(), 2)
    with pytest.raises(PlanError, match=message):
        plan().check(tensors, world)


def test_a_link_follows_its_points():
    link = Link("all_reduce", "flat", 2, Line(slope=1.0), ((100.0, 1.0), (200.0, 3.0), (400.0, 4.0), (1000.0, 7.0)))
    assert link.seconds(0) == link.seconds(100) == 1.0
    assert link.seconds(150) == pytest.approx(2.0)
    assert link.seconds(400) == pytest.approx(4.0)
    assert link.seconds(700) == pytest.approx(5.5)
    assert link.seconds(1800) == pytest.approx(7.0 + 800 * 4 / 800)
    wire, latency = link.parts(700)
    assert (wire, latency) == (pytest.approx(4.5), 1.0)
    assert link.parts(50) == (0.0, 1.0)
    plain = Link("all_reduce", "flat", 2, Line(start=2.0, slope=0.5))
    assert plain.parts(10) == (5.0, 2.0)


def test_points_that_do_not_ascend_are_refused(tmp_path):
    profile = examples.profile()
    link = msgspec.structs.replace(profile.links[0], points=((1.0, 1.0), (2.0, 0.5)))
    with pytest.raises(ProfileError, match="do not ascend at 2 bytes"):
        msgspec.structs.replace(profile, links=(link, *profile.links[1:])).check()


def test_links_that_are_slower_are_slower_by_the_byte():
    profile = examples.profile()
    link = msgspec.structs.replace(profile.links[0], points=((64.0, 0.001), (1e6, 0.011)))
    slow = scaled(msgspec.structs.replace(profile, links=(link, *profile.links[1:])), 10.0)
    assert slow.links[0].seconds(64) == pytest.approx(0.001)
    assert slow.links[0].seconds(1e6) == pytest.approx(0.101)
    assert slow.links[1].line.slope == pytest.approx(10 * profile.links[1].line.slope)
