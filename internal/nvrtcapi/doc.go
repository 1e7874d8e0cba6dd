// Package nvrtcapi is the part of NVRTC, the run-time compiler of CUDA C++, that package
// kernel needs.
package nvrtcapi

// Program is nvrtcProgram.
type Program uintptr

// API is the part of NVRTC that Chorus uses. None of its calls needs a context.
type API interface {
	Version() (major, minor int32, r Result)
	SupportedArchs() ([]int32, Result) // in ascending order; 90 is sm_90
	CreateProgram(source, name string) (Program, Result)
	CompileProgram(p Program, options []string) Result
	GetCUBIN(p Program) ([]byte, Result)
	GetPTX(p Program) ([]byte, Result)
	GetProgramLog(p Program) (string, Result)
	DestroyProgram(p Program) Result
}
