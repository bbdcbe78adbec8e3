"""Auto-tuning: `attach(ddp)` without a codec measures a job, plans it, tries the plan and monitors it."""
