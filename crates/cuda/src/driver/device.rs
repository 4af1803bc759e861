//! What GPUs there are.

use std::ffi::{c_char, c_int};

use super::table::{RawDevice, table};
use super::{DriverError, NoDriver, call};

/// A GPU, as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Device {
    /// Its number among those that the driver shows.
    pub number: usize,
    /// Its product name.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Compute capability, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes of second-level cache.
    pub cache: u64,
    /// The most bytes of shared memory that a block of threads may have.
    pub shared_memory: u64,
    /// Whether it shares its memory with the host.
    pub integrated: bool,
    /// Bytes a second that its memory's clock and width give; 0 if the driver doesn't tell.
    pub memory_rate: u64,
    /// Where it sits on the bus, such as `0000:01:00.0`.
    pub bus: String,
}

/// The driver's CUDA version, such as `(13, 0)`.
pub fn driver_version() -> Result<(u32, u32), DriverError> {
    let table = table()?;
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { call!(table, driver_version(&mut version)) }?;
    Ok((version as u32 / 1000, version as u32 % 1000 / 10))
}

const SHARED_MEMORY_OPTIN: c_int = 97;
const PROCESSORS: c_int = 16;
const INTEGRATED: c_int = 18;
const MEMORY_CLOCK: c_int = 36;
const MEMORY_WIDTH: c_int = 37;
const CACHE: c_int = 38;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

impl Device {
    /// All GPUs, in the driver's order; `CUDA_VISIBLE_DEVICES` has its say. That there is none is an error.
    pub fn all() -> Result<Vec<Device>, DriverError> {
        let table = table()?;
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { call!(table, device_count(&mut count)) }?;
        if count <= 0 {
            return Err(NoDriver::NoDevice.into());
        }
        (0..count as usize).map(Device::get).collect()
    }

    /// The link to the host as it is now, such as `32.0 GT/s PCIe, 16 lanes`; nothing where the system doesn't tell.
    pub fn link(&self) -> Option<String> {
        let folder = format!("/sys/bus/pci/devices/{}", self.bus.to_lowercase());
        let read =
            |name: &str| Some(std::fs::read_to_string(format!("{folder}/{name}")).ok()?.trim().to_owned());
        Some(format!("{}, {} lanes", read("current_link_speed")?, read("current_link_width")?))
    }

    /// Bytes a second that the link to the host gives at most, as it could be: a link at rest is slower. Nothing where the system doesn't tell.
    pub fn link_rate(&self) -> Option<f64> {
        let folder = format!("/sys/bus/pci/devices/{}", self.bus.to_lowercase());
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok();
        link_rate(&read("max_link_speed")?, &read("max_link_width")?)
    }

    fn get(number: usize) -> Result<Device, DriverError> {
        let table = table()?;
        let raw = raw(number)?;
        let attribute = |which: c_int| -> Result<u32, DriverError> {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { call!(table, device_attribute(&mut value, which, raw)) }?;
            Ok(value as u32)
        };
        let mut memory = 0;
        // SAFETY: writes one size.
        unsafe { call!(table, device_memory(&mut memory, raw)) }?;
        Ok(Device {
            number,
            // SAFETY: writes at most the given number of bytes, with a zero at the end.
            name: text(|at, len| unsafe { call!(table, device_name(at, len, raw)) })?,
            // SAFETY: as above.
            bus: text(|at, len| unsafe { call!(table, device_bus(at, len, raw)) })?,
            memory: memory as u64,
            capability: (attribute(CAPABILITY_MAJOR)?, attribute(CAPABILITY_MINOR)?),
            processors: attribute(PROCESSORS)?.max(1),
            cache: u64::from(attribute(CACHE)?),
            shared_memory: u64::from(attribute(SHARED_MEMORY_OPTIN)?),
            integrated: attribute(INTEGRATED)? == 1,
            // Kilohertz and bits; two transfers a cycle.
            memory_rate: 2 * 1000 / 8
                * u64::from(attribute(MEMORY_CLOCK)?)
                * u64::from(attribute(MEMORY_WIDTH)?),
        })
    }
}

/// A sixth or so goes into packets' heads and into waiting: 54 GB/s of 64 were measured with 16 lanes of PCIe 5.
const PAYLOAD: f64 = 0.85;

/// Of a speed such as `32.0 GT/s PCIe` and a number of lanes.
fn link_rate(speed: &str, lanes: &str) -> Option<f64> {
    let transfers: f64 = speed.split_whitespace().next()?.parse().ok()?;
    let lanes: f64 = lanes.trim().parse().ok()?;
    let rate = PAYLOAD * transfers * lanes * 1e9 / 8.0;
    (rate > 0.0).then_some(rate)
}

/// The driver's handle of a GPU.
pub(super) fn raw(number: usize) -> Result<RawDevice, DriverError> {
    let table = table()?;
    let mut raw = 0;
    // SAFETY: writes one integer.
    unsafe { call!(table, device(&mut raw, number as c_int)) }?;
    Ok(raw)
}

fn text(get: impl FnOnce(*mut c_char, c_int) -> Result<(), DriverError>) -> Result<String, DriverError> {
    let mut bytes = [0u8; 256];
    get(bytes.as_mut_ptr().cast(), 256)?;
    let len = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..len]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand. One bit a transfer and lane.
    #[test]
    fn links_have_rates() {
        assert_eq!(link_rate("32.0 GT/s PCIe\n", "16\n"), Some(PAYLOAD * 64e9));
        assert_eq!((link_rate("Unknown", "16"), link_rate("8.0 GT/s PCIe", "0")), (None, None));
    }
}
