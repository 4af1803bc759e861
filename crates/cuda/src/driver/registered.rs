//! Memory that the process has anyway, made known to the GPU: pages that stay where they are, so that copies and kernels reach them.

use std::ffi::c_void;
use std::ops::Range;

use super::table::DevicePtr;
use super::{Context, DriverError, call};

/// Kernels may read it too.
const DEVICE_MAP: u32 = 2;

/// A stretch of host memory that the GPU reads by itself.
pub struct RegisteredMemory {
    context: Context,
    /// Addresses of the process.
    host: Range<usize>,
    /// Where the GPU sees the first.
    device: DevicePtr,
}

impl RegisteredMemory {
    /// Registers whole pages. The system may refuse, for the pages stay resident from now on.
    ///
    /// # Safety
    /// The addresses are memory of this process, and stay so until this is dropped.
    pub unsafe fn new(context: &Context, host: Range<usize>) -> Result<RegisteredMemory, DriverError> {
        let at = host.start as *mut c_void;
        // SAFETY: the caller's promise.
        unsafe { call!(context.table(), register_host(at, host.len(), DEVICE_MAP)) }?;
        let mut registered = RegisteredMemory { context: context.clone(), host, device: 0 };
        // SAFETY: writes one address of memory that was registered above.
        unsafe { call!(context.table(), host_address(&mut registered.device, at, 0)) }?;
        context.count(|made| &made.pinned);
        Ok(registered)
    }

    /// Its addresses in the process.
    pub fn host(&self) -> Range<usize> {
        self.host.clone()
    }

    /// Where the GPU sees a host address of it.
    pub fn device(&self, host: usize) -> Option<DevicePtr> {
        self.host.contains(&host).then(|| self.device + (host - self.host.start) as DevicePtr)
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        // SAFETY: registered in `new`.
        unsafe { (self.context.table().unregister_host)(self.host.start as *mut c_void) };
    }
}
