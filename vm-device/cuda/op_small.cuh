// nop and embed. Same as the files of these names in reference-vm/src/ops/.
#pragma once

__device__ __forceinline__ void op_embed(Worker& w, StagedTask const& st) {
  amk_embed_params const p = *(amk_embed_params const*)st.task.params;
  for_seqs(w, [&] {
    Words const out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
    for (uint32_t i = threadIdx.x; i < p.len; i += CONSUMERS) {
      word_write(out, p.offset + i, embed_scaled(buffer_read(w, st.buffer[0], p.offset + i), p.scale));
    }
  });
  task_barrier(w);
}
