//! Block-format products, decoding and activation quantisation on whatever GPU is here: the checks of `strata selftest`. Oracle:
//! `strata-quant`, bit for bit. Without a GPU, or in a build without kernels, the tests say so and pass.

use strata_quant::Isa;
use strata_selftest::ops::{self, OnCpu, OnGpu};
use strata_selftest::{CheckError, Found};

/// Makes a check on the first GPU with kernels for it, or prints a line that says why there is none.
fn check(what: &str, check: impl FnOnce(&mut OnGpu, &mut OnCpu) -> Result<Found, CheckError>) {
    let Some(mut gpu) = strata_selftest::or_skip(OnGpu::first()) else { return };
    let found = check(&mut gpu, &mut OnCpu(Isa::detect())).unwrap();
    assert!(found.equal(), "{what}: {found}");
}

#[test]
fn activations_are_quantised_alike() {
    check("quantisation", |gpu, cpu| ops::quantisation(gpu, cpu));
}

#[test]
fn the_largest_are_found_alike() {
    check("the largest", |gpu, cpu| ops::largest(gpu, cpu));
}

#[test]
fn every_format_decodes_alike() {
    for format in ops::block_formats() {
        check(format.name(), |gpu, cpu| ops::decoding(format, gpu, cpu));
    }
}

#[test]
fn every_format_multiplies_alike() {
    for format in ops::block_formats() {
        check(format.name(), |gpu, cpu| ops::products(format, gpu, cpu));
    }
}
