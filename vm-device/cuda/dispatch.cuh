// The one switch over opcodes.
#pragma once

// Runs the staged task. The caller has waited for its counters.
__device__ __forceinline__ void dispatch(Worker& w, StagedTask const& st, uint32_t opcode, Cursor& c) {
#if AMK_SEQS > 1
  // Keeps the compiler from carrying values derived from these across tasks: there are no registers for that.
  uint32_t shared = shared_address(w.shared), x = shared_address(w.x), ring = shared_address(w.ring);
  asm volatile("" : "+r"(w.thread), "+r"(shared), "+r"(x), "+r"(ring));
  w.shared = (Shared*)shared_place(shared), w.x = shared_place(x), w.ring = shared_place(ring);
#endif
  if (opcode == AMK_OP_MATVEC) { // most tasks
#if AMK_SEQS > 1
    op_matvec_batch(w, st, c);
#else
    op_matvec(w, st, c);
#endif
    return;
  }
  switch (opcode) {
  case AMK_OP_NOP:
    task_barrier(w);
    break;
  case AMK_OP_EMBED:
    op_embed(w, st);
    break;
  case AMK_OP_ATTENTION:
    op_attention(w, st, c);
    break;
  case AMK_OP_ATTENTION_MERGE:
    op_attention_merge(w, st);
    break;
#if AMK_FEATURES >> AMK_FEATURE_NORM & 1
  case AMK_OP_NORM:
    op_norm(w, st);
    break;
#endif
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  case AMK_OP_ROUTE:
    op_route(w, st);
    break;
#endif
  case AMK_OP_SAMPLE:
#if AMK_SEQS > 1
    op_sample_batch(w, st);
#else
    op_sample(w, st);
#endif
    break;
  default:
    if (threadIdx.x == 0) {
      fault(w.shared, AMK_TRAP_BAD_OPCODE, st.task.opcode, st.task.opcode, 0);
    }
    task_barrier(w);
  }
}
