// The one switch over opcodes.
#pragma once

// Runs the staged task. The caller has waited for its counters.
__device__ __forceinline__ void dispatch(Worker& w, StagedTask const& st, Cursor& c) {
  switch (st.task.opcode) {
  case AMK_OP_NOP:
    task_barrier(w);
    break;
  case AMK_OP_EMBED:
    op_embed(w, st);
    break;
  case AMK_OP_MATVEC:
    op_matvec(w, st, c);
    break;
  case AMK_OP_ATTENTION:
    op_attention(w, st, c);
    break;
  case AMK_OP_ATTENTION_MERGE:
    op_attention_merge(w, st);
    break;
  case AMK_OP_SAMPLE:
    op_sample(w, st);
    break;
  default:
    if (threadIdx.x == 0) {
      fault(w.shared, AMK_TRAP_BAD_OPCODE, st.task.opcode, st.task.opcode, 0);
    }
    task_barrier(w);
  }
}
