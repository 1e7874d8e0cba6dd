// Package nccl implements the interface of NCCL over the memory of virtual devices.
//
// Ranks of a communicator find each other by the unique id, in one process or in
// several, over Unix-domain sockets (or TCP, see Config). If ranks issue different
// collectives, every rank receives an error with the difference.
package nccl
