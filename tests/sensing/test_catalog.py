"""The catalogue: that its data is whole, and that people and drivers find what they mean."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oomph.errors import UnknownGpu
from oomph.records.gpu_model import GpuModel
from oomph.sensing import catalog
from oomph.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "oomph" / "sensing" / "catalog.json"
SPECS = ROOT.parent / "shared" / "data" / "gpu_specs.csv"

WORDS = {"name", "title", "architecture", "sources", "note"}
FIGURES = [field.name for field in fields(GpuModel) if field.name not in WORDS]

models = st.sampled_from(catalog.all_models())
separators = st.sampled_from(["", " ", "-", "_", "/", ".", "  ", " - ", "\u2011", "\u00a0"])


def by_name(name: str) -> GpuModel:
    return next(model for model in catalog.all_models() if model.name == name)


def refusal(text: str) -> UnknownGpu:
    with pytest.raises(UnknownGpu) as caught:
        catalog.find(text)
    return caught.value


# --- the data -----------------------------------------------------------------------------------


def test_the_catalogue_has_every_card_once() -> None:
    names = [model.name for model in catalog.all_models()]
    titles = [model.title for model in catalog.all_models()]
    assert len(names) >= 77
    assert len(set(names)) == len(names)
    assert len(set(titles)) == len(titles)


def test_names_are_lower_case_words_joined_by_hyphens() -> None:
    for model in catalog.all_models():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", model.name)


def test_every_figure_has_a_source_and_every_source_is_in_the_legend() -> None:
    for model in catalog.all_models():
        for name in FIGURES:
            if getattr(model, name) is not None:
                assert set(tags_of(model.sources[name])) <= set(catalog.sources())


def tags_of(source: str) -> list[str]:
    return re.sub(r" \(.*\)$", "", source).split(" + ")


def test_every_tag_of_the_legend_is_used() -> None:
    text = " ".join(
        " ".join([*model.sources.values(), model.note or ""]) for model in catalog.all_models()
    )
    for tag in catalog.sources():
        assert tag in text


def test_what_the_hardware_lacks_is_told_apart_from_what_nobody_says() -> None:
    v100, a16 = by_name("v100-16gb"), by_name("a16")
    assert v100.bf16_flops is None
    assert v100.sources["bf16_flops"].startswith("none")
    assert a16.bf16_flops is None
    assert "bf16_flops" not in a16.sources


def test_unsourced_figures_stay_marked() -> None:
    assert by_name("a100-80gb").sources["pcie"] == "unsourced"


def test_sizes_and_rates_are_sane() -> None:
    for model in catalog.all_models():
        assert model.memory_bytes % GIB == 0
        assert 4 * GIB <= model.memory_bytes < 512 * GIB
        if model.measured_bytes is not None:
            assert 0.9 < model.measured_bytes / model.memory_bytes < 1
        if model.memory_bandwidth_bytes_per_s is not None:
            assert 1e11 < model.memory_bandwidth_bytes_per_s < 1e13
        assert all(1e12 < rate < 1e16 for rate in rates_of(model))


def rates_of(model: GpuModel) -> Iterator[float]:
    for name in FIGURES:
        rate = getattr(model, name)
        if name.endswith("_flops") and rate is not None:
            yield rate


def test_a_measured_matmul_stays_below_the_datasheet() -> None:
    for model in catalog.all_models():
        if model.matmul_bf16_flops is not None:
            assert model.bf16_flops is not None
            assert model.matmul_bf16_flops < model.bf16_flops


def test_measured_totals_are_those_of_their_sources() -> None:
    assert by_name("v100-16gb").measured_bytes == 16160 * MIB
    assert by_name("a100-40gb").measured_bytes == 42474471424
    assert by_name("rtx3060-12gb").measured_bytes == 12622168064
    assert by_name("rtx4060").measured_bytes == 8318222336
    assert by_name("a100-80gb").measured_bytes == int(79.15 * GIB)
    assert by_name("rtx3090").measured_bytes == int(23.70 * GIB)


def test_units_of_the_datasheet_become_bytes_and_operations() -> None:
    a100 = by_name("a100-80gb")
    assert a100.memory_bytes == 80 * GIB
    assert a100.memory_bandwidth_bytes_per_s == 2039 * 10**9
    assert a100.bf16_flops == 312e12
    assert a100.nvlink_bytes_per_s == 600 * 10**9
    assert a100.compute_capability == (8, 0)
    assert by_name("rtx4090").bf16_flops == 165.2e12


def test_the_file_has_no_key_that_nobody_reads() -> None:
    known = set(catalog.FIGURES) | {
        *("name", "title", "product", "form", "brand", "architecture", "sold_as_gb", "note"),
    }
    for entry in json.loads(FILE.read_text("utf-8"))["gpus"]:
        assert set(entry) <= known


def test_models_can_be_kept_in_sets() -> None:
    assert len(set(catalog.all_models())) == len(catalog.all_models())


# --- the survey that the data was taken from ----------------------------------------------------

COLUMNS = {
    "bandwidth_gbs": ("memory_bandwidth_bytes_per_s", 1e9),
    "fp32_tflops": ("fp32_flops", 1e12),
    "tf32_dense_tflops": ("tf32_flops", 1e12),
    "fp16_dense_tflops": ("fp16_flops", 1e12),
    "bf16_dense_tflops": ("bf16_flops", 1e12),
    "matmul_achievable_bf16_tflops": ("matmul_bf16_flops", 1e12),
    "sm_count": ("num_sms", 1),
    "nvlink_gbs_total_bidir": ("nvlink_bytes_per_s", 1e9),
}
# The survey doubts this one itself; NVIDIA's own table gives 10.3.
SUPERSEDED = {("B300 SXM 288GB", "10.0")}


def rows_of_the_survey() -> list[dict[str, str]]:
    if not SPECS.exists():
        pytest.skip("the survey that the data was taken from is not here")
    with SPECS.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def models_of(row: dict[str, str]) -> list[GpuModel]:
    """A row that stands for two sizes ("8/16GB", "12 or 24 GB") is two models."""
    title = re.sub(r" \(.*\)", "", row["gpu"])
    sizes = re.search(r"(\d+)(?:/| or )(\d+) ?GB", f"{title} {row['notes']}")
    if sizes is None:
        return [catalog.find(title).model]
    product = re.sub(r" \d+/\d+GB", "", title)
    return [catalog.find(f"{product} {size}GB").model for size in sizes.groups()]


def test_every_number_of_the_survey_is_in_the_catalogue() -> None:
    for row in rows_of_the_survey():
        for model in models_of(row):
            for column, (name, unit) in COLUMNS.items():
                if row[column] not in ("", "none"):
                    assert getattr(model, name) == pytest.approx(float(row[column]) * unit)


def test_what_the_survey_calls_none_is_none() -> None:
    for row in rows_of_the_survey():
        for model in models_of(row):
            for column, (name, _) in COLUMNS.items():
                if row[column] == "none":
                    assert getattr(model, name) is None
                    assert model.sources[name].startswith("none")


def test_memory_capability_and_slot_of_the_survey_are_in_the_catalogue() -> None:
    for row in rows_of_the_survey():
        found = models_of(row)
        if row["memory_gb"]:
            assert int(row["memory_gb"]) * GIB in [model.memory_bytes for model in found]
        for model in found:
            assert model.architecture == row["arch"]
            if (row["gpu"], row["compute_capability"]) not in SUPERSEDED:
                assert row["compute_capability"] == "{}.{}".format(*model.compute_capability or ())
            if row["pcie"]:
                assert model.pcie == row["pcie"]


def test_every_model_of_the_catalogue_beyond_the_survey_is_one_that_we_added() -> None:
    surveyed = {model.name for row in rows_of_the_survey() for model in models_of(row)}
    added = {model.name for model in catalog.all_models()} - surveyed
    from_laptops = {name for name in added if "laptop" in name or "max-q" in name}
    assert added - from_laptops == {
        *("a5500", "a800-80gb", "quadro-rtx6000", "quadro-rtx8000", "rtx2000-ada"),
        *("rtx2060-super", "rtx4000-ada", "titan-xp"),
    }


# Of which NVIDIA card or form the catalogue has no figures yet, and other makers'.
NOT_THERE = {
    *("V100-SXM3 32GB", "H100 SXM 96GB HBM2e", "A40 46GB", "NVIDIA GH200 SXM", "NVIDIA GB200 SXM"),
    *("Intel Gaudi 2", "Intel Gaudi 3", "AMD MI300X", "AMD MI325X", "AMD MI355X"),
}


def gpus_of_published_runs() -> set[str]:
    """Names as sources give them, without remarks; those that name no card are left out."""
    found = set()
    for name in ("step_times", "kernel_rates", "recipes", "gpu_measurements"):
        path = SPECS.with_name(f"{name}.csv")
        if not path.exists():
            pytest.skip("the published runs are not here")
        with path.open(encoding="utf-8") as file:
            found |= {row["gpu"] for row in csv.DictReader(file)}
    without_remarks = {
        re.sub(r" \(.*| class,.*| (8x )?NVLink.*| 2 nodes.*", "", gpu) for gpu in found
    }
    no_card = re.compile(r"not stated|any |\d+GB card|.* nodes|Colab GPU|.* / ")
    return {gpu for gpu in without_remarks if not no_card.match(gpu)}


def test_every_gpu_that_a_published_run_names_is_in_the_catalogue() -> None:
    for gpu in gpus_of_published_runs() - NOT_THERE:
        assert catalog.find(gpu).model, gpu


# --- what people type ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("A100-80GB", "a100-80gb"),
        ("a100 80", "a100-80gb"),
        ("a100_80g", "a100-80gb"),
        ("a100 80 GiB", "a100-80gb"),
        ("a100 pcie 80", "a100-pcie-80gb"),
        ("a100 80gb pci-e", "a100-pcie-80gb"),
        ("a100 sxm 80", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("rtx 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("4090 24gb", "rtx4090"),
        ("geforce rtx 4090", "rtx4090"),
        ("v100-16gb", "v100-16gb"),
        ("v100 32gb", "v100-32gb"),
        ("v100s", "v100s"),
        ("tesla t4", "t4"),
        ("h100 sxm", "h100-80gb"),
        ("h100 pcie", "h100-pcie-80gb"),
        ("h100 nvl", "h100-nvl"),
        ("h100 94gb", "h100-nvl"),
        ("h200", "h200"),
        ("3080 ti", "rtx3080-ti"),
        ("3080ti", "rtx3080-ti"),
        ("3080 12", "rtx3080-12gb"),
        ("4070 ti super", "rtx4070-ti-super"),
        ("4070tisuper", "rtx4070-ti-super"),
        ("4060 ti 16g", "rtx4060-ti-16gb"),
        ("a6000", "a6000"),
        ("rtx a6000", "a6000"),
        ("rtx 6000 ada", "rtx6000-ada"),
        ("quadro rtx 6000", "quadro-rtx6000"),
        ("rtx pro 6000", "rtx-pro-6000"),
        ("rtx pro 6000 blackwell", "rtx-pro-6000"),
        ("A10G", "a10g"),
        ("A10", "a10"),
        ("L4", "l4"),
        ("L40", "l40"),
        ("L40S", "l40s"),
        ("l40s pcie", "l40s"),
        ("titan rtx", "titan-rtx"),
        ("TITAN V", "titan-v"),
        ("h20", "h20"),
    ],
)
def test_what_people_type_is_found_without_an_assumption(typed: str, name: str) -> None:
    found = catalog.find(typed)
    assert found.model.name == name
    assert found.assumed is None


@pytest.mark.parametrize(
    ("typed", "name", "assumed"),
    [
        (
            "nvidia a100",
            "a100-40gb",
            (
                "A100 comes with 40 and 80 GB, as SXM4 and PCIe: taken as 40 GB, SXM4; "
                "say a100-80gb, a100-pcie-40gb or a100-pcie-80gb for another"
            ),
        ),
        (
            "a100 pcie",
            "a100-pcie-40gb",
            "A100 PCIe comes with 40 and 80 GB: taken as 40 GB; say a100-pcie-80gb for the other",
        ),
        (
            "h100",
            "h100-80gb",
            (
                "H100 comes with 80 and 94 GB, as SXM5, PCIe and NVL: taken as 80 GB, SXM5; "
                "say h100-pcie-80gb or h100-nvl for another"
            ),
        ),
        (
            "3060",
            "rtx3060-8gb",
            "RTX 3060 comes with 8 and 12 GB: taken as 8 GB; say rtx3060-12gb for the other",
        ),
        (
            "p100",
            "p100-16gb",
            "P100 comes as SXM2 and PCIe: taken as SXM2; say p100-pcie-16gb for the other",
        ),
        (
            "b300 288gb",
            "b300",
            "B300 is sold with 288 GB, of which 270 GB are usable: taken as 270 GB",
        ),
    ],
)
def test_what_is_left_open_is_taken_cautiously_and_said(
    typed: str, name: str, assumed: str
) -> None:
    found = catalog.find(typed)
    assert found.model.name == name
    assert found.assumed == assumed


@given(model=models)
def test_an_open_memory_size_is_never_taken_as_more_than_the_smallest(model: GpuModel) -> None:
    without_size = re.sub(r" \d+GB$", "", model.title)
    assert catalog.find(without_size).model.memory_bytes <= model.memory_bytes


@given(model=models)
def test_every_model_is_found_by_its_name_and_nothing_is_assumed(model: GpuModel) -> None:
    found = catalog.find(model.name)
    assert found.model is model
    assert found.assumed is None


@given(model=models, data=st.data())
def test_neither_case_nor_separators_matter(model: GpuModel, data: st.DataObject) -> None:
    written = data.draw(st.sampled_from([model.name, model.title, f"NVIDIA {model.title}"]))
    runs = re.findall(r"[A-Za-z]+|[0-9]+", written)
    text = runs[0]
    for before, run in itertools.pairwise(runs):
        separator = data.draw(separators)
        if before.isdigit() and run.isdigit():  # "a100 80" must not become "a10080"
            separator = separator or " "
        text += separator + run
    text = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in text)
    assert catalog.find(text).model is model


# --- what nobody sells --------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["rtx 30", "titan", "rtx", "6000", "rtx 6000", "80gb", "tesla"])
def test_a_text_that_fits_several_products_is_refused_with_some_of_them(typed: str) -> None:
    error = refusal(typed)
    assert "several" in str(error)
    assert 2 <= len(error.nearest) <= 5


def test_a_product_that_three_others_continue_is_not_guessed() -> None:
    assert {"quadro-rtx6000", "rtx6000-ada"} <= set(refusal("rtx 6000").nearest)


def test_a_wrong_memory_size_names_the_sizes_that_exist() -> None:
    error = refusal("a100-60gb")
    assert error.what == "the catalogue has no A100 with 60 GB"
    assert error.nearest == ("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb")
    assert refusal("rtx4090-48gb").because == "it has RTX 4090 with 24 GB"


@pytest.mark.parametrize("typed", ["h100 pcie 94gb", "h100 sxm4", "rtx4090 sxm", "a100 40gb 80gb"])
def test_a_form_or_combination_that_does_not_exist_is_refused(typed: str) -> None:
    assert refusal(typed).nearest


@pytest.mark.parametrize("typed", ["rtx 3050 laptop", "NVIDIA GeForce RTX 3050 Laptop GPU"])
def test_a_laptop_gpu_is_not_offered_the_desktop_card_of_its_name(typed: str) -> None:
    error = refusal(typed)
    assert "laptop" in str(error)
    assert all("laptop" in name for name in error.nearest)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "rtx3080-ti-laptop"),
        ("rtx 4090 laptop", "rtx4090-laptop"),
        ("4070 mobile", "rtx4070-laptop"),
        ("RTX 5090 Notebook", "rtx5090-laptop"),
        ("GeForce RTX 2070 with Max-Q Design", "rtx2070-max-q"),
        ("2080 max-q", "rtx2080-max-q"),
        ("Quadro RTX 5000 with Max-Q Design", "quadro-rtx5000-max-q"),
        ("NVIDIA RTX A5000 Laptop GPU", "a5000-laptop"),
        ("rtx 8000", "quadro-rtx8000"),
        ("TITANXP", "titan-xp"),
        ("RTX A5500", "a5500"),
        ("A800-SXM4-80GB", "a800-80gb"),
    ],
)
def test_a_laptop_gpu_or_a_rare_card_is_found_by_its_names(typed: str, name: str) -> None:
    found = catalog.find(typed)
    assert found.model.name == name
    assert found.assumed is None


def test_a_laptop_gpu_is_slower_than_the_desktop_card_of_its_name() -> None:
    laptops = [model for model in catalog.all_models() if model.name.endswith("-laptop")]
    compared = 0
    for model in laptops:
        desktop = next(
            (card for card in catalog.all_models() if f"{card.name}-laptop" == model.name), None
        )
        if desktop and desktop.fp32_flops and model.fp32_flops:
            assert model.fp32_flops < desktop.fp32_flops
            compared += 1
    assert compared >= 10  # as many as have both


@pytest.mark.parametrize(
    "typed",
    [
        *("b1000", "rx 7900", "a10h", "a1000", "a100x", "v100t", "a10 0", "h100 ampere", "4090 d"),
        *("", "   ", "---", "nvidia", "\U0001f525", "4090\U0001f525", "a100\x00", "x" * 10_000),
        *("a100 " * 2_000, "9" * 10_000, "a100 99999gb", "8xa100"),
    ],
)
def test_a_text_that_names_no_gpu_is_refused(typed: str) -> None:
    error = refusal(typed)
    assert len(error.nearest) <= 5
    assert len(str(error)) < 500


def test_a_typing_error_is_answered_with_the_name_that_was_meant() -> None:
    assert "rtx4090" in refusal("rtx 4909").nearest
    assert "a100-80gb" in refusal("aa100-80gb").nearest


def answers(text: str) -> tuple[str, ...]:
    """The name that was found, or those that are offered instead."""
    try:
        return (catalog.find(text).model.name,)
    except UnknownGpu as error:
        return error.nearest


@given(text=st.text(max_size=200))
@example(text="\ud800")
@example(text="\u212a80")  # the Kelvin sign, whose lower case is a plain k
def test_junk_raises_unknown_gpu_or_nothing(text: str) -> None:
    names = {model.name for model in catalog.all_models()}
    assert names >= set(answers(text))
    assert catalog.find_by_nvml_name(text, None) in (None, *catalog.all_models())


@given(text=st.text(alphabet="nvidartxgefoclpshm 0123456789-_", max_size=80))
def test_whatever_is_nearly_a_name_is_found_or_refused(text: str) -> None:
    with contextlib.suppress(UnknownGpu):
        assert catalog.find(text).model in catalog.all_models()


# --- what drivers say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "total_mib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("A100-SXM4-40GB", None, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", None, "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
        ("Tesla V100-PCIE-16GB", None, "v100-pcie-16gb"),
        ("Tesla V100S-PCIE-32GB", None, "v100s"),
        ("Tesla P100-PCIE-16GB", 16280, "p100-pcie-16gb"),
        ("Tesla T4", 15109, "t4"),
        ("Tesla K80", 11441, "k80"),
        ("Tesla M40", 11448, "m40-12gb"),
        ("Tesla M40 24GB", 22945, "m40-24gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx3080-12gb"),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx3060-12gb"),
        ("NVIDIA GeForce RTX 2080 Ti", 11264, "rtx2080-ti"),
        ("NVIDIA GeForce RTX 4070", 12282, "rtx4070"),
        ("NVIDIA GeForce RTX 4070 Ti", 12282, "rtx4070-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx4070-ti-super"),
        ("GeForce GTX 1080 Ti", 11178, "gtx1080-ti"),
        ("NVIDIA TITAN RTX", 24576, "titan-rtx"),
        ("NVIDIA TITAN V", None, "titan-v"),
        ("NVIDIA RTX A6000", 49140, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 46068, "rtx6000-ada"),
        ("Quadro RTX 6000", 24576, "quadro-rtx6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("NVIDIA A10G", 22731, "a10g"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H200 NVL", None, "h200-nvl"),
        ("NVIDIA GH200 480GB", 97871, "gh200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA B300 SXM6 AC", 275040, "b300"),
    ],
)
def test_the_name_of_a_driver_finds_its_model(said: str, total_mib: int | None, name: str) -> None:
    found = catalog.find_by_nvml_name(said, None if total_mib is None else total_mib * MIB)
    assert found is by_name(name)


@pytest.mark.parametrize(
    ("said", "total_mib"),
    [
        ("NVIDIA GeForce RTX 3050 Laptop GPU", 4096),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", 8192),
        ("NVIDIA GeForce RTX 2080 SUPER", 8192),
        ("NVIDIA GeForce RTX 4090 D", 24564),
        ("NVIDIA GeForce RTX 4090", 49140),  # a card with its memory doubled by a third party
        ("NVIDIA GeForce RTX 3050", 6144),
        ("NVIDIA GeForce RTX 3060", None),  # 8 or 12 GB
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864),
        ("NVIDIA A40-48Q", 49152),
        ("NVIDIA A100-SXM-64GB", 65536),
        ("NVIDIA H20-3e", 143771),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20475),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887),
        ("NVIDIA Graphics Device", None),
        ("NVIDIA Tegra Orin", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_a_driver_that_names_another_gpu_finds_none(said: str, total_mib: int | None) -> None:
    assert catalog.find_by_nvml_name(said, None if total_mib is None else total_mib * MIB) is None


@given(model=models)
def test_a_measured_total_finds_the_model_that_it_was_measured_on(model: GpuModel) -> None:
    total_bytes = model.measured_bytes or model.memory_bytes
    assert catalog.find_by_nvml_name(f"NVIDIA {model.title}", total_bytes) is model


@pytest.mark.parametrize("text", ["mi300x", "AMD Instinct MI250", "rx 7900 xtx", "Intel Arc A770"])
def test_a_gpu_of_another_maker_gets_no_nvidia_gpu_suggested(text: str) -> None:
    refused = refusal(text)
    assert refused.because == "it has NVIDIA's only"
    assert refused.nearest == ()
