//! What is in host memory, brought by kernels: experts for a few rows, and what the host computed: `kernels/fetch.cu`.

use super::route::Stretch;
use super::{OpError, module};
use crate::driver::{Context, DeviceSlice, DriverError, Grid, Kernel, Stream};
use crate::tiers::{LayerTable, WantedParams};

#[repr(C)]
#[derive(Clone, Copy)]
struct FetchParams {
    slots: u64,
    fetched: u64,
    room: u64,
    first: u64,
    end: u64,
    unit_expert: u64,
    units: u64,
    wanted: WantedParams,
    bytes: u32,
    by_expert: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RowsParams {
    rows: u64,
    places: u64,
    to: u64,
    count: u32,
    width: u32,
}

/// The kernels.
pub(crate) struct Fetch {
    fetch: Kernel<FetchParams>,
    brought: Kernel<WantedParams>,
    rows: Kernel<RowsParams>,
    processors: usize,
}

impl Fetch {
    pub(crate) fn new(context: &Context) -> Result<Fetch, OpError> {
        let processors = context.device().processors as usize;
        let module = module(context, "fetch")?;
        Ok(Fetch {
            fetch: module.kernel("strata_fetch")?,
            brought: module.kernel("strata_brought")?,
            rows: module.kernel("strata_bring_rows")?,
            processors,
        })
    }

    /// Brings the experts of all units to `room`, if there is room for them, and says where kernels find them then: at the places of the units, or of the
    /// experts, of whichever there are fewer. Those that it can't read it asks the host for, where `wanted` says.
    pub(crate) fn all(
        &self,
        stream: &Stream,
        slots: &LayerTable,
        (unit_expert, units, experts): (u64, Stretch, usize),
        device: DeviceSlice<u8>,
        (room, fetched): (DeviceSlice<u8>, DeviceSlice<u64>),
        wanted: Option<WantedParams>,
    ) -> Result<Option<LayerTable>, DriverError> {
        if units.most.min(experts) * slots.layout.bytes > room.len() {
            return Ok(None);
        }
        let p = FetchParams {
            slots: slots.table.address(),
            fetched: fetched.address(),
            room: room.address(),
            first: device.address(),
            end: device.address() + device.len() as u64,
            unit_expert,
            units: units.units[1],
            wanted: wanted.unwrap_or_default(),
            bytes: slots.layout.bytes as u32,
            by_expert: u32::from(units.most > experts),
        };
        let grid = Grid { blocks: [self.processors as u32, 1, 1], threads: 256 };
        // SAFETY: there is room for as many copies as there are units or experts; `fetched` has a place for every expert.
        unsafe { self.fetch.launch(stream, grid, &p)? };
        if let Some(wanted) = wanted {
            // SAFETY: it waits for an answer to what was asked before, and takes it.
            unsafe { self.brought.launch(stream, Grid { blocks: [1; 3], threads: 32 }, &wanted)? };
        }
        Ok(Some(LayerTable { table: fetched, ..*slots }))
    }

    /// Queues bringing rows, `[rows][width]`, to their places of `to`, `[..][width]`.
    ///
    /// # Safety
    /// Both lists are in pinned memory that nobody writes to before it is done.
    pub(crate) unsafe fn bring_rows(
        &self,
        stream: &Stream,
        (rows, places): (&[f32], &[u32]),
        to: DeviceSlice<f32>,
        width: usize,
    ) -> Result<(), DriverError> {
        assert!(rows.len() == places.len() * width);
        assert!(places.iter().all(|&place| (place as usize + 1) * width <= to.len()));
        let p = RowsParams {
            // The driver gives host memory one address for both.
            rows: rows.as_ptr().expose_provenance() as u64,
            places: places.as_ptr().expose_provenance() as u64,
            to: to.address(),
            count: places.len() as u32,
            width: width as u32,
        };
        let grid = Grid { blocks: [places.len().clamp(1, 2 * self.processors) as u32, 1, 1], threads: 256 };
        // SAFETY: the places were checked, the caller leaves the lists alone.
        unsafe { self.rows.launch(stream, grid, &p) }
    }
}
