//! Compiles `kernels/*.cu` into one fat binary each, where an `nvcc` is found: in `CUDA_HOME`, on the `PATH`, or among Python's
//! `nvidia-cuda-nvcc` wheels. Without one the crate is built without kernels, and says so here and to whoever asks for a GPU.
//!
//! `CUDA_ARCHS` names the architectures, such as `75,80,86,89,90a,100,120`; PTX of the first is added for GPUs that are newer than
//! all of them. By default they are those of the GPUs in this machine, or `75` where there is none.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

/// The same file that the CPU's kernels have.
#[allow(dead_code)]
#[path = "../quant/src/formats/grids.rs"]
mod grids;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(kernels)");
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=../quant/src/formats/grids.rs");
    for variable in ["CUDA_HOME", "PATH", "CUDA_ARCHS"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let Some(nvcc) = find_nvcc() else {
        println!(
            "cargo::warning=built without GPU kernels: no nvcc in CUDA_HOME, on the PATH, or among Python's nvidia-cuda-nvcc wheels"
        );
        return;
    };
    fs::write(out.join("codebooks.cuh"), codebooks()).expect("OUT_DIR can be written");
    let mut sources: Vec<PathBuf> = fs::read_dir("kernels")
        .expect("the crate has kernels")
        .map(|entry| entry.expect("kernels can be listed").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let architectures = architectures();
    let version = Command::new(&nvcc).arg("--version").output().map(|said| said.stdout).unwrap_or_default();
    let compile = |source: &Path| {
        let image = image_of(source, &out);
        // What an image is made of; one that is there already, of the same, is not made again.
        let of = format!("{}\n{architectures:?}\n{}", String::from_utf8_lossy(&version), text(source, &out));
        let made = image.with_extension("made");
        if image.is_file() && fs::read_to_string(&made).is_ok_and(|before| before == of) {
            return;
        }
        let mut command = Command::new(&nvcc);
        command.args(["-std=c++17", "-O3", "-fmad=false", "--fatbin", "--threads", "0", "-I"]).arg(&out);
        command.args(&architectures).arg(source).arg("-o").arg(&image);
        let ended = command.status().unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
        assert!(ended.success(), "{} does not compile: nvcc ended with {ended}", source.display());
        fs::write(made, of).expect("OUT_DIR can be written");
    };
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = Mutex::new(sources.iter());
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let source = next.lock().expect("no compiler holds it").next();
                    let Some(source) = source else { return };
                    compile(source);
                }
            });
        }
    });
    let mut images = String::from("&[\n");
    for source in &sources {
        let (name, image) =
            (source.file_stem().expect("sources have names").display(), image_of(source, &out));
        writeln!(images, "    ({:?}, include_bytes!({:?})),", name.to_string(), image.display().to_string())
            .unwrap();
    }
    fs::write(out.join("images.rs"), images + "]").expect("OUT_DIR can be written");
    println!("cargo::rustc-cfg=kernels");
}

/// What a source is compiled to.
fn image_of(source: &Path, out: &Path) -> PathBuf {
    out.join(source.with_extension("fatbin").file_name().expect("sources have names"))
}

/// A source with all that it includes of ours.
fn text(source: &Path, out: &Path) -> String {
    fn add(path: &Path, out: &Path, seen: &mut Vec<PathBuf>, all: &mut String) {
        if seen.iter().any(|other| other == path) {
            return;
        }
        seen.push(path.to_owned());
        let Ok(text) = fs::read_to_string(path) else { return };
        for line in text.lines() {
            let Some(name) = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) else {
                continue;
            };
            [path.with_file_name(name), out.join(name)].iter().for_each(|path| add(path, out, seen, all));
        }
        all.push_str(&text);
    }
    let mut all = String::new();
    add(source, out, &mut Vec::new(), &mut all);
    all
}

/// The compiler: of a folder that was named, of the `PATH`, or of a Python package.
fn find_nvcc() -> Option<PathBuf> {
    let name = if cfg!(windows) { "nvcc.exe" } else { "nvcc" };
    let named = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let python = || {
        let script = "import nvidia, os; print(*(os.path.join(p, d, 'bin') for p in nvidia.__path__ for d in sorted(os.listdir(p), reverse=True)), sep='\\n')";
        let found = Command::new("python3").args(["-c", script]).output().ok()?;
        String::from_utf8(found.stdout).ok()
    };
    let in_folder = |folder: PathBuf| Some(folder.join(name)).filter(|nvcc| nvcc.is_file());
    named
        .into_iter()
        .chain(env::split_paths(&path))
        .find_map(in_folder)
        .or_else(|| python()?.lines().map(PathBuf::from).find_map(in_folder))
}

/// What nvcc is told to compile for.
fn architectures() -> Vec<String> {
    let named = env::var("CUDA_ARCHS").ok().filter(|list| !list.trim().is_empty());
    let list = named.or_else(present).unwrap_or_else(|| "75".into());
    let list: Vec<&str> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let mut flags: Vec<String> =
        list.iter().map(|name| format!("-gencode=arch=compute_{name},code=sm_{name}")).collect();
    // An architecture's own variant (90a) runs nowhere else, so its PTX would be of no use.
    let base = list.first().map_or("75", |name| name.trim_end_matches(|c: char| c.is_ascii_alphabetic()));
    flags.push(format!("-gencode=arch=compute_{base},code=compute_{base}"));
    flags
}

/// The architectures of this machine's GPUs.
fn present() -> Option<String> {
    let query = Command::new("nvidia-smi")
        .args(["--query-gpu=compute_cap", "--format=csv,noheader"])
        .output()
        .ok()?;
    let text = String::from_utf8(query.stdout).ok().filter(|_| query.status.success())?;
    let mut found: Vec<String> = text.lines().map(|line| line.trim().replace('.', "")).collect();
    found.retain(|name| !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()));
    found.sort();
    found.dedup();
    for name in &mut found {
        // Hopper's matrix instructions belong to its own variant.
        if name == "90" {
            name.push('a');
        }
    }
    (!found.is_empty()).then(|| found.join(","))
}

/// The grids as C arrays of 32-bit words. Those of IQ2 have the three magnitudes 8, 25 and 43: four bits each say which.
fn codebooks() -> String {
    let mut text = String::from("#pragma once\n#include <cstdint>\n");
    let mut table = |name: &str, words: &mut dyn Iterator<Item = u32>| {
        let words: Vec<String> = words.map(|word| format!("{word:#x}")).collect();
        writeln!(
            text,
            "__device__ const uint32_t __align__(16) CODEBOOK_{name}[{}] = {{{}}};",
            words.len(),
            words.join(",")
        )
        .unwrap();
    };
    let halves = |row: &u64| [*row as u32, (*row >> 32) as u32];
    table("IQ1", &mut grids::IQ1.iter().flat_map(halves));
    let which = |row: &u64| {
        let magnitudes = row.to_le_bytes().into_iter().enumerate();
        magnitudes.map(|(i, magnitude)| u32::from(magnitude >> 4 & 3) << (4 * i)).sum()
    };
    table("IQ2_XXS", &mut grids::IQ2_XXS.iter().map(which));
    table("IQ2_XS", &mut grids::IQ2_XS.iter().map(which));
    table("IQ2_S", &mut grids::IQ2_S.iter().map(which));
    table("IQ3_XXS", &mut grids::IQ3_XXS.iter().copied());
    table("IQ3_S", &mut grids::IQ3_S.iter().copied());
    text
}
