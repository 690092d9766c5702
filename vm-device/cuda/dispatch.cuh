// The one switch over opcodes.
#pragma once

// Runs the staged task. The caller has waited for its counters; `unit` is the place in the step's weight stream.
__device__ __forceinline__ void dispatch(Worker const& w, StagedTask const& st, Cursor& c, uint32_t& unit) {
  switch (st.task.opcode) {
  case AMK_OP_NOP:
    break;
  case AMK_OP_EMBED:
    op_embed(w, st);
    break;
  case AMK_OP_MATVEC:
    op_matvec(w, st, c, unit);
    break;
  case AMK_OP_ATTENTION:
    op_attention(w, st);
    break;
  case AMK_OP_ATTENTION_MERGE:
    op_attention_merge(w, st);
    break;
  case AMK_OP_SAMPLE:
    op_sample(w, st);
    break;
  default:
    if (threadIdx.x == 0) {
      trap(w.shared, AMK_TRAP_BAD_OPCODE, st.task.opcode, st.task.opcode, 0, 0);
    }
  }
}
