//! `strata devices`: what there is to compute with.

use serde_json::json;
use strata_cuda::driver::{Device, driver_version};
use strata_cuda::kernels_are_built;
use strata_plan::Bytes;

use super::counted;
use crate::args::DevicesArgs;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::wiring::Machine;

pub fn run(args: &DevicesArgs, machine: &Machine) -> Result<(), Failure> {
    let gpus = Device::all();
    let version = driver_version().ok().map(|(major, minor)| format!("{major}.{minor}"));
    let (limits, notes) = (machine.limits(), machine.notes());
    let why_no_gpu = match &gpus {
        Err(why) => Some(why.to_string()),
        Ok(_) => kernels_are_built().err().map(|why| why.to_string()),
    };
    if args.json {
        let listed = |gpus: &Vec<Device>| {
            gpus.iter().map(|gpu| json!({ "device": gpu, "link": gpu.link() })).collect::<Vec<_>>()
        };
        return print_json(&json!({
            "gpus": gpus.as_ref().map_or_else(|_| Vec::new(), listed),
            "cuda": version,
            "why_no_gpu": why_no_gpu,
            "threads": machine.threads(),
            "assignment": machine.assignment().to_string(),
            "memory": limits,
            "notes": notes,
        }));
    }
    let mut out = String::new();
    if let Ok(gpus) = &gpus {
        for gpu in gpus {
            let (major, minor) = gpu.capability;
            let link = gpu.link().unwrap_or_else(|| "unknown link".into());
            out += &format!(
                "cuda:{}  {}: {} of memory, compute capability {major}.{minor}, {}, {} at {link}\n",
                gpu.number,
                gpu.name,
                Bytes(gpu.memory),
                counted(gpu.processors, "multiprocessor"),
                gpu.bus
            );
        }
        out += &format!("driver  CUDA {}\n", version.unwrap_or_default());
    }
    if let Some(why) = why_no_gpu {
        out += &format!("no GPU is used: {why}\n");
    }
    out += &format!(
        "cpu     {}\n{}\n",
        counted(machine.threads() as u64, "computing thread"),
        machine.assignment()
    );
    out += &format!(
        "memory  {} of {} to give, by {}\n",
        Bytes(limits.available),
        Bytes(limits.total),
        limits.source
    );
    for note in notes {
        out += &format!("note: {note}\n");
    }
    print(&out)
}
