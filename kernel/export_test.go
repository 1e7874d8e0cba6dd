package kernel

// These let tests read the fields of the error of Verify.
type (
	VerifyError = verifyError
	Difference  = difference
)
