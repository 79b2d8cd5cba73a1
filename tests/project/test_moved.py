"""Paths that the documentation of 0.1 named still lead somewhere, for one release."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import warnings

import pytest

import dpspan
from dpspan.support.moved import MOVED

# As they stood in the pages, the reference and the examples of 0.1
DOCUMENTED = [
    "dpspan.accounting.Budget",
    "dpspan.accounting.calibrate",
    "dpspan.advice.advise.advise",
    "dpspan.anchors.RandomSubspace",
    "dpspan.audit.MembershipResult",
    "dpspan.audit.membership_inference",
    "dpspan.augmentation.RandomAffine",
    "dpspan.capture.Capture",
    "dpspan.carriers.History",
    "dpspan.certificate.certificate",
    "dpspan.certificate.weights_sha256",
    "dpspan.certificate.write_certificate",
    "dpspan.choose.Choice",
    "dpspan.choose.ProbeNetwork",
    "dpspan.choose.choose_public",
    "dpspan.choose.gsd.gsd",
    "dpspan.choose.rank_public",
    "dpspan.choose.resolution",
    "dpspan.clipping.AutomaticClipping",
    "dpspan.clipping.FlatClipping",
    "dpspan.comparison.Contender",
    "dpspan.comparison.Task",
    "dpspan.comparison.compare.compare",
    "dpspan.convex.FeatureBounds",
    "dpspan.convex.GradientDescent",
    "dpspan.convex.NoisyAdaGrad",
    "dpspan.convex.PrivateLinearRegression",
    "dpspan.convex.PrivateLinearSVC",
    "dpspan.convex.PrivateLogisticRegression",
    "dpspan.convex.PublicScaling",
    "dpspan.encoding.encode",
    "dpspan.encoding.encode_public",
    "dpspan.engine.PrivacyEngine",
    "dpspan.errors.BudgetExceeded",
    "dpspan.errors.CaptureError",
    "dpspan.errors.DPSpanError",
    "dpspan.errors.UnsupportedModule",
    "dpspan.events.event_from_json",
    "dpspan.gradients.PerSampleGradients",
    "dpspan.ledger.Ledger",
    "dpspan.low_rank.LowRank",
    "dpspan.low_rank.unprivate_low_rank",
    "dpspan.mechanisms.dpsgd.DPSGD",
    "dpspan.mechanisms.gep.BiasedGEP",
    "dpspan.mechanisms.gep.GEP",
    "dpspan.mechanisms.in_subspace.SubspaceMethod",
    "dpspan.mechanisms.mirror.MirrorDescent",
    "dpspan.mechanisms.pdpsgd.PDPSGD",
    "dpspan.mechanisms.rgp.RGP",
    "dpspan.mixing.ConstantMixing",
    "dpspan.mixing.CosineMixing",
    "dpspan.models.MLP",
    "dpspan.models.ResNet20",
    "dpspan.overlap.without_public",
    "dpspan.patches.PatchFeatures",
    "dpspan.per_sample.per_sample_gradients",
    "dpspan.public.PublicData",
    "dpspan.public_gradients.RandomLabels",
    "dpspan.public_gradients.RealLabels",
    "dpspan.report.render",
    "dpspan.sampling.BatchMemoryManager",
    "dpspan.sampling.PrivateLoader",
    "dpspan.second_phase.SecondPhase",
    "dpspan.solvers.Eigh",
    "dpspan.solvers.Lanczos",
    "dpspan.solvers.PowerIteration",
    "dpspan.span.by_stage",
    "dpspan.subspace.Subspace",
    "dpspan.text.minilm_classifier",
    "dpspan.text.minilm_tokenizer",
    "dpspan.trainable.BiasOnly",
    "dpspan.trainable.FirstAndLast",
    "dpspan.trainable.LastLayers",
    "dpspan.trainable.LoRA",
    "dpspan.trainable.Named",
    "dpspan.trainable.train_only",
    "dpspan.transfer.WarmStart",
    "dpspan.validation.fix",
    "dpspan.validation.validate",
]


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_path_leads_to_the_same_thing(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = pkgutil.resolve_name(path)
    name = path.rpartition(".")[2]
    assert found.__name__ == name
    if name in dpspan.__all__:
        assert found is getattr(dpspan, name)


def test_an_old_path_says_where_to_go() -> None:
    code = "import dpspan; from dpspan.carriers import History"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "dpspan.carriers has moved to dpspan.mechanisms.carriers" in done.stderr


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dpspan.nothing")
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("dpspan.carriers:Nothing")


def test_every_new_path_exists() -> None:
    for new in MOVED.values():
        pkgutil.resolve_name(new)


def test_a_module_below_a_package_that_moved_may_have_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MOVED, "dpspan.run.parts", "dpspan.app.run.from_config")
    for name in ("dpspan.run", "dpspan.run.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=r"moved to dpspan\.app\.run\.from_config"):
        old = importlib.import_module("dpspan.run.parts")
    assert old.make_parts is importlib.import_module("dpspan.app.run.from_config").make_parts
