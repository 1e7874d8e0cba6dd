package nvrtcapi

import "strconv"

// Result is nvrtcResult. Its Error text is the C name.
type Result int32

// The results that Chorus tells apart.
const (
	Success            Result = 0
	ErrorInvalidOption Result = 5
	ErrorCompilation   Result = 6
)

// names has the C names in the order of nvrtc.h, from 0.
var names = []string{"NVRTC_SUCCESS", "NVRTC_ERROR_OUT_OF_MEMORY", "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
	"NVRTC_ERROR_INVALID_INPUT", "NVRTC_ERROR_INVALID_PROGRAM", "NVRTC_ERROR_INVALID_OPTION",
	"NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
	"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION", "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
	"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID", "NVRTC_ERROR_INTERNAL_ERROR", "NVRTC_ERROR_TIME_FILE_WRITE_FAILED",
	"NVRTC_ERROR_NO_PCH_CREATE_ATTEMPTED", "NVRTC_ERROR_PCH_CREATE_HEAP_EXHAUSTED", "NVRTC_ERROR_PCH_CREATE",
	"NVRTC_ERROR_CANCELLED", "NVRTC_ERROR_TIME_TRACE_FILE_WRITE_FAILED"}

// Error returns the C name, such as NVRTC_ERROR_COMPILATION.
func (r Result) Error() string {
	if r >= 0 && int(r) < len(names) {
		return names[r]
	}
	return "nvrtcResult " + strconv.Itoa(int(r))
}
