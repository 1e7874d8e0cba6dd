// Package nancheck looks for elements that are not a number in the inputs of collectives, by a
// kernel on the operation's stream (TORCH_NCCL_NAN_CHECK). The host reads the result from pinned
// memory and waits for nothing.
package nancheck
