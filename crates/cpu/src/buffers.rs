//! The activation buffers that the engine named.

use strata_backend::{BackendError, Buffer, Spec};
use strata_plan::Block;

use crate::failed;

/// All buffers.
pub(crate) struct Buffers {
    list: Vec<Block<f32>>,
}

impl Buffers {
    /// Over the buffers' memory, in order.
    pub(crate) fn new(list: Vec<Block<f32>>) -> Buffers {
        Buffers { list }
    }

    /// The first `rows` rows of `width` floats of different buffers.
    pub(crate) fn get<const N: usize>(
        &mut self,
        wanted: [(Buffer, usize, usize); N],
    ) -> Result<[&mut [f32]; N], BackendError> {
        let count = self.list.len();
        let wrong = |what: String| failed(format!("an op's buffers {:?}: {what}", wanted.map(|w| w.0.0)));
        let parts = self
            .list
            .get_disjoint_mut(wanted.map(|(buffer, ..)| buffer.0 as usize))
            .map_err(|_| wrong(format!("they are not different ones of {count}")))?;
        let mut out = parts.map(|block| &mut block[..]);
        for (out, (buffer, rows, width)) in out.iter_mut().zip(wanted) {
            let (len, needed) = (out.len(), rows * width);
            if len < needed {
                return Err(wrong(format!(
                    "{} has {len} floats where {rows} rows of {width} are needed",
                    buffer.0
                )));
            }
            *out = &mut std::mem::take(out)[..needed];
        }
        Ok(out)
    }

    /// Copies floats out.
    pub(crate) fn read(&self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError> {
        let block = self.list.get(buffer.0 as usize);
        let part = block.and_then(|block| block.get(first..first.checked_add(out.len())?));
        let part =
            part.ok_or_else(|| failed(format!("{} floats from {first} are not in {buffer:?}", out.len())))?;
        out.copy_from_slice(part);
        Ok(())
    }
}

/// Bytes of a buffer.
pub(crate) fn bytes(spec: &Spec, index: usize) -> usize {
    let buffer = &spec.buffers[index];
    buffer.rows.saturating_mul(buffer.width).saturating_mul(size_of::<f32>())
}
