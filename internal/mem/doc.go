// Package mem holds the parts of package memory that other packages of Chorus need and
// users do not: checks of buffers, pools of captures, and peer access. Public types embed
// a reference, as with package gpu.
package mem
