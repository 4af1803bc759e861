//! `cargo bench -p strata-cuda --bench products`: what share of the memory's bandwidth the products of each format reach, on a matrix
//! several times the size of the cache; and how many multiply-adds a second. Arguments: the formats, or all. Needs a GPU.

use strata_cuda::driver::{Context, Device, DeviceMemory, Event, Stream};
use strata_cuda::ops::{Columns, Products};
use strata_quant::Format;

const K: usize = 2560;
const REPETITIONS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let devices = Device::all()?;
    let context = Context::new(devices.first().ok_or("the driver shows no GPU")?)?;
    let stream = Stream::new(&context)?;
    let products = Products::new(&context)?;
    let device = context.device();
    println!("{}, {} processors, {} MiB of cache", device.name, device.processors, device.cache >> 20);
    println!("{:<8} {:>5} {:>10} {:>10} {:>10}", "format", "cols", "us", "GB/s", "Tmac/s");
    let named: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let wanted = |format: &Format| {
        named.is_empty() || named.iter().any(|name| name.eq_ignore_ascii_case(format.name()))
    };
    for format in Format::ALL.into_iter().filter(|format| !format.is_float()).filter(wanted) {
        let rows = (256 << 20) / format.row_bytes(K).expect("a multiple of 256");
        let weights = DeviceMemory::new(&context, rows * format.row_bytes(K).expect("as above"))?;
        // Bytes that repeat at no power of two; what they mean doesn't matter for the time.
        let pattern: Vec<u8> =
            (0..weights.slice::<u8>().len()).map(|i| (i * 37 % 251) as u8 & 0x3f).collect();
        stream.upload(&pattern, weights.slice())?;
        for cols in [1, 8, 64, 80, 128, 512, 4096] {
            let memory = DeviceMemory::new(&context, Columns::bytes_for(K, cols))?;
            let columns = Columns::new(&memory, K, cols);
            let x: Vec<f32> = (0..K * cols).map(|i| (i * 31 % 97) as f32 - 48.0).collect();
            let input = DeviceMemory::new(&context, 4 * x.len())?;
            stream.upload(&x, input.slice())?;
            products.quantise(&stream, input.slice(), &columns)?;
            let out = DeviceMemory::new(&context, 4 * rows * cols)?;
            let room = DeviceMemory::new(&context, 40 << 20)?;
            let (start, end) = (Event::new(&context)?, Event::new(&context)?);
            let run = || {
                products.product(
                    &stream,
                    (format, weights.slice()),
                    [rows, K, cols],
                    &columns,
                    None,
                    out.slice(),
                    room.slice(),
                )
            };
            run()?;
            let mut times = Vec::new();
            for _ in 0..REPETITIONS {
                start.record(&stream)?;
                run()?;
                end.record(&stream)?;
                end.wait()?;
                times.push(end.milliseconds_since(&start)?);
            }
            times.sort_by(f32::total_cmp);
            let seconds = f64::from(times[REPETITIONS / 2]) / 1e3;
            let bytes = (rows * format.row_bytes(K).expect("as above")) as f64;
            println!(
                "{:<8} {cols:>5} {:>10.1} {:>10.0} {:>10.2}",
                format.name(),
                seconds * 1e6,
                bytes / seconds / 1e9,
                (rows * K * cols) as f64 / seconds / 1e12
            );
        }
    }
    Ok(())
}
