// Package analyze compares the flight recorders of all ranks of a job and says which rank,
// or which hardware, a hang comes from. It reads the dumps of Chorus and of PyTorch, as JSON or
// pickles, and answers of NCCL's RAS service. It also finds the rank that the others wait for again and again. The files may come from
// anybody: Load limits their size and number, and no text of a file reaches the report without plain.Text.
package analyze
