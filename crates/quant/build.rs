//! Names one condition, `x86_paths`, for "there are vector paths in this build", so that it is written once.
fn main() {
    println!("cargo::rustc-check-cfg=cfg(x86_paths)");
    println!("cargo::rerun-if-changed=build.rs");
    let x86 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    let portable = std::env::var_os("CARGO_FEATURE_PORTABLE").is_some();
    if x86 && !portable {
        println!("cargo::rustc-cfg=x86_paths");
    }
}
